"""What a training step is: the target, the sample, the step, the state it changes."""
