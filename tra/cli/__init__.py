"""The command. One file a verb; nothing else parses arguments."""
