"""Parts of the mixins that the source distribution of transformers leaves out."""
