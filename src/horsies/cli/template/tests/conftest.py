"""Settings for all tests."""

import os

# The application reads this variable on import. No connection is opened unless a test opens one.
os.environ.setdefault("HORSIES_DATABASE_URL", "embedded://")
