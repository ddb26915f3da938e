"""The prefix cache that SGLang's scheduler drives, and the tier behind it."""
