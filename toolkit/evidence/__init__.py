"""What notebooks leave: tables with their circumstances, published numbers beside ours, figures, the report."""
