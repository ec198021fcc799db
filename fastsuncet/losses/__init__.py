"""The losses, each in a file of its name; the contrastive ones share the chunked sweep of contrast.py."""
