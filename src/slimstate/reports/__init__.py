"""Write records as tables, figures and one self-contained HTML page. Nothing here loads a model."""
