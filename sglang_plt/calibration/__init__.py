"""From rows to a profile: second moments, sensitivities, and the fit. Torch only, no SGLang."""
