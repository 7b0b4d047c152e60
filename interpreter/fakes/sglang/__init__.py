"""A fake of SGLang's own server API."""
