"""Histories that engines share through Redis. They are a cache there: losing them costs acceptance, never output."""
