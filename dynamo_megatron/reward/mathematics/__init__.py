"""Answers in mathematics: their normal form, a parser that understands all of an answer or nothing, and equality."""
