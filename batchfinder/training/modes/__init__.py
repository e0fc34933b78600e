"""Forward passes without gradients: validation during training, and inference.

Read ``evaluation``, then ``forward_step``.
"""
