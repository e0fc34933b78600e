"""``batchfinder run``: launch an unmodified training script at one batch size after another."""
