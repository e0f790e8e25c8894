"""Prints the licence texts of what a program of potluck contains.

usage: licences.py METADATA [NAME=FILE..]

METADATA is the output of `cargo metadata` for the platform. Each NAME=FILE is the text of something
else that is linked into the program.
"""

import json
import pathlib
import sys

BEGINNINGS = ("license", "licence", "copying", "copyright", "notice", "unlicense")
LINE = "=" * 98


def linked(metadata):
    """Returns the packages that are part of the program, without those of builds and tests."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found, unseen = set(), [metadata["resolve"]["root"]]
    while unseen:
        package = unseen.pop()
        if package in found:
            continue
        found.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                unseen.append(dependency["pkg"])
    packages = [package for package in metadata["packages"] if package["id"] in found]
    # Those of the workspace have no source, and the licence of potluck.
    return [package for package in packages if package["source"]]


def texts(folder):
    """Returns the licence texts in a folder and in its folders of such names."""
    found = []
    for path in sorted(folder.iterdir()):
        if not path.name.lower().startswith(BEGINNINGS):
            continue
        if path.is_dir():
            found += [each.read_text(errors="replace") for each in sorted(path.iterdir())]
        elif path.suffix not in (".rs", ".py", ".toml"):
            found.append(path.read_text(errors="replace"))
    return [text.strip("\n") for text in found if text.strip()]


def main():
    metadata, *others = sys.argv[1:]
    packages = linked(json.loads(pathlib.Path(metadata).read_text()))
    packages.sort(key=lambda package: (package["name"], package["version"]))
    # Texts that differ in blanks alone are one.
    users, without = {}, []
    print("potluck contains the following packages, each under its own licence.\n")
    for package in packages:
        name = f"{package['name']} {package['version']}"
        licence = package["license"] or "see its text"
        print(", ".join(filter(None, [f"  {name}: {licence}", package["repository"]])))
        found = texts(pathlib.Path(package["manifest_path"]).parent)
        for text in found:
            users.setdefault(" ".join(text.split()), (text, []))[1].append(name)
        if not found:
            by = ", ".join(package["authors"]) or "its contributors"
            without.append(f"  {name}: {licence}, copyright {by}")
    for other in others:
        name, path = other.split("=", 1)
        print(f"  {name}")
        users[name] = (pathlib.Path(path).read_text(errors="replace").strip("\n"), [name])
    without.append("  the standard library of Rust: MIT OR Apache-2.0, copyright its contributors")
    print("\nParts without a copy of the text of their licence, which is among those below:\n")
    print("\n".join(without))
    for text, names in users.values():
        print(f"\n{LINE}\n{', '.join(names)}\n{LINE}\n\n{text}")


if __name__ == "__main__":
    main()
