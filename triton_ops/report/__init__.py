"""What the Triton kernels cost, found without a GPU: see ``python -m triton_ops.report --help``."""
