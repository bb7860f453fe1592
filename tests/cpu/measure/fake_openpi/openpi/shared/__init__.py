"""As in openpi."""
