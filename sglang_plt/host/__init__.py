"""What the cache needs to know of a running SGLang: its KV pool, its rotary embedding, its ranks."""
