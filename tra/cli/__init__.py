"""The command `tra`: one file a verb. Nothing else parses arguments."""
