"""What compiles kernels, keeps them, chooses among them and runs them on threads."""
