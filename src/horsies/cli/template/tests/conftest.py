"""Settings for all tests."""

import os

# The application reads this when it is imported. Nothing connects to it unless a test does.
os.environ.setdefault("HORSIES_DATABASE_URL", "embedded://")
