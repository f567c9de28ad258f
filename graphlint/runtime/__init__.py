"""The runtime half: the guard, the dry run, the profile. Imports torch where it is used, never libcst."""

import warnings

# torch says so on import where NumPy is missing; nothing here needs NumPy, and a user's one-line error should stay one line
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
