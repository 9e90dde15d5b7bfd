"""The drawings of the documentation: `python -m tools.drawings` writes them into docs/images.

A drawing is an SVG with the colours of the dashboard, in light and in dark. The repository shows it as
an image; the site embeds it in the page, where it follows the light or dark mode.
"""
