"""What torch has to know of the operators besides how to run them: shapes, gradients, counts of operations."""
