"""Print the results of workflows as text and tables."""
