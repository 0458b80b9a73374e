"""What holds for a process: its settings, loading its kernels, what this installation is, and its warnings."""
