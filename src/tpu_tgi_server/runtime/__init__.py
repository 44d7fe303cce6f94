"""The seam to the accelerator stack. Only this room, and kernels that need it, import torch_xla."""
