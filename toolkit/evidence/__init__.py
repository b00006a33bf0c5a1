"""The results of notebooks: tables with their circumstances, published numbers beside ours, figures, the report."""
