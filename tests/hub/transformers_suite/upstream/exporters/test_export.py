"""Stands in for a module of transformers that its source distribution leaves out."""


class ExportTesterMixin:
    """Checks nothing: `test_export_formats.py` has tests of torch.export and ONNX of our own."""
