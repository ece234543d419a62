"""Make tables, figures and the page from run folders. Reads their files alone, never a model."""
