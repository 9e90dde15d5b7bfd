"""The tracer behind `tools.way`: a switchable profile hook and the program that it watches."""
