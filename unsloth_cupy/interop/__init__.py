"""Other array libraries: how their arrays come in and go back."""
