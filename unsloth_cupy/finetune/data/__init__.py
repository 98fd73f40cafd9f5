"""Training data: reads files, chats and texts, and makes batches of tokens."""
