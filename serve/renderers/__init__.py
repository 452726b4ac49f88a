"""Messages and text to token ids, and back."""
