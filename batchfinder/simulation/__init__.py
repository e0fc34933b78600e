"""A CUDA device on paper: a training step on fake tensors, in a model of the allocator."""
