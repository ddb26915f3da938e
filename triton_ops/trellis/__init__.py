"""Entropy-coded transform components: trellis-coded quantisation, and interleaved range ANS with row contexts."""
