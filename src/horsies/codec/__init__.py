"""Task calls and results as JSON text, written and read by annotations."""
