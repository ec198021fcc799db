"""fastsuncet: contrastive pre-training that uses labels (SuNCEt, arXiv 2006.10803), fast and bit-for-bit resumable."""

__version__ = "0.1.0"
