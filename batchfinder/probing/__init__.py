"""How one batch size is tried: in this process or in a worker, on which device."""
