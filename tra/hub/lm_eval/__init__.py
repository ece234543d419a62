"""A task for EleutherAI's harness, whose --include_path is this folder."""
