"""Model folders: read tensor by tensor, written whole or not at all."""
