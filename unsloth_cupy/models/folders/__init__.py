"""Models on disk: folders of Hugging Face and of other libraries are read, divided and written."""
