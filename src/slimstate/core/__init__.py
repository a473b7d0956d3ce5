"""The values that flow through slimstate and the mathematics on them; torch alone. Start reading here."""
