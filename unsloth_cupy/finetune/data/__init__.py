"""Training data: files of any form, chats, texts, tokens, batches."""
