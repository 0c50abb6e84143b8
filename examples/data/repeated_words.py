"""Print JSON lines whose text is one line of 16 random words, six times.

python examples/data/repeated_words.py data/corpus_large_texts/prose.jsonl > repeated_words.jsonl

A model that copies from its context predicts all lines but the first. The words are the lowercase
words of three to nine letters in the texts of the given file.
"""

import json
import random
import re
import sys
from pathlib import Path

texts = [json.loads(line)["text"] for line in Path(sys.argv[1]).read_bytes().splitlines()]
words = sorted({word for text in texts for word in re.findall(r"\b[a-z]{3,9}\b", text)})
draws = random.Random(0)
for _ in range(400):
    line = " ".join(draws.sample(words, 16))
    print(json.dumps({"text": f"{line}\n" * 6}))
