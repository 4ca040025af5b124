NAMES = ("west", "mid", "east")
