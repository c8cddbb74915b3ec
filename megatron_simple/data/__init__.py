"""From raw text to batches of token ids: tokenizers, dataset files, sample indices, the loader. No torch here."""
