"""Tables and figures. Reads run folders and rows of results only, never a model."""
