"""Gradients of the operators: what exists and what is refused, where dW goes and when it is computed."""
