"""The engine of generation: rows that join and leave a batch between its steps."""
