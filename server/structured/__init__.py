"""Answers kept to a grammar: JSON schemas, regular expressions, choices and Lark grammars, compiled and followed."""
