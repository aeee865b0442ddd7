#!/usr/bin/env bash
# Exits 0 if a Java that Spark can use (17 or newer) is found, else says the exact command that installs one
# and exits 1. As root on Debian it runs that command itself.
set -euo pipefail

wanted=17

say() { printf '%s\n' "$*" >&2; }

# The major version of the Java that Spark would start, or nothing.
java_major() {
    local java=java
    if [ -n "${JAVA_HOME:-}" ]; then java=$JAVA_HOME/bin/java; fi
    # On macOS /usr/bin/java exists without a Java behind it: it must run, not only be there.
    "$java" -version 2>&1 | sed -n 's/^[a-z]* version "\([0-9]*\).*/\1/p' | head -n 1
}

major=$(java_major || true)
if [ -n "$major" ] && [ "$major" -ge "$wanted" ]; then exit 0; fi

if [ -n "$major" ]; then
    found="Java $major"
else
    found="no Java"
fi
if [ -n "${JAVA_HOME:-}" ]; then found="$found (JAVA_HOME is $JAVA_HOME)"; fi

if [ "$(uname -s)" = Darwin ]; then
    say "Spark needs Java $wanted or newer; found $found. Install it with: brew install openjdk@17"
    exit 1
fi
if command -v apt-get >/dev/null; then
    # The default Java of the release where it is new enough (Debian 12 has 17, Debian 13 has 21).
    package=default-jre-headless
    if [ "$(id -u)" = 0 ] && [ -z "${JAVA_HOME:-}" ]; then
        say "Spark needs Java $wanted or newer; found $found. Running: apt-get install -y $package"
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$package"; } >&2
        major=$(java_major || true)
        if [ -n "$major" ] && [ "$major" -ge "$wanted" ]; then exit 0; fi
        say "That gave Java ${major:-nothing}; Spark needs $wanted or newer."
        exit 1
    fi
    say "Spark needs Java $wanted or newer; found $found. Install it with: sudo apt-get install -y $package"
elif command -v dnf >/dev/null; then
    say "Spark needs Java $wanted or newer; found $found. Install it with: sudo dnf install -y java-21-openjdk-headless"
else
    say "Spark needs Java $wanted or newer; found $found. Install a JRE and put java on the PATH or set JAVA_HOME."
fi
exit 1
