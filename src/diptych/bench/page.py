def render(data, records):
    return ""
