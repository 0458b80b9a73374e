"""What every expert layer is made of: its products, one differentiable function of them, and the expert-major layer."""
