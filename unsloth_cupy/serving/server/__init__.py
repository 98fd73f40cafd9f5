"""A server with OpenAI's API: requests over HTTP, whose rows one engine computes."""
