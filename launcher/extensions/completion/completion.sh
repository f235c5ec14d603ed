# Completion of `launch` for bash, zsh and fish. `launch completion SHELL` prints this file behind the functions that it
# calls, which are generated: _launch_verbs, _launch_flags VERB, _launch_keys TASK and _launch_values KEY TASK print one word
# a line. Everything runs in the shell, so that no Python has to start for a word.

# Prints the candidates for the last argument, one a line. The other arguments are the words between it and `launch`.
_launch_candidates() {
    _verb='' _task='' _dir=runs _before='' _all=''
    while [ $# -gt 1 ]; do
        case $1 in
            --) return ;; # a script and its arguments
            --dir=*) _dir=${1#--dir=} ;;
            task=*) _task=${1#task=} ;;
            -*) ;;
            *) [ "$_before" != --dir ] && [ -z "$_verb" ] && _verb=$1 ;;
        esac
        [ "$_before" = --dir ] && _dir=$1
        _before=$1
        shift
    done
    case $_before in --dir | --config-dir | --config-name | --html | --to) return ;; esac # a path, or a file's name
    case $_dir in '~/'*) _dir=$HOME/${_dir#'~/'} ;; esac
    if [ -z "$_verb" ]; then
        _launch_verbs
        return
    fi
    case $1 in -*)
        _launch_flags "$_verb"
        return
        ;;
    esac
    case $_verb in
        status | logs | cancel | resume | retry | mirror | export | report | runs)
            for _run in "$_dir"/*/; do
                [ -e "${_run}plan.json" ] || [ -e "${_run}sweep.json" ] || continue
                _run=${_run%/}
                printf '%s\n' "${_run##*/}"
            done
            ;;
        completion) printf '%s\n' bash zsh fish ;;
    esac
    case $_verb in
        train | plan | verify | drill | run | doctor | keys) _task=${_task:-bytes_gpt} ;;
        resume) ;;
        *) return ;;
    esac
    case $1 in
        *=*) # values, also behind a comma
            _all=${1#*=}
            case $_all in *,*) _all=${_all%,*}, ;; *) _all='' ;; esac
            _launch_values "${1%%=*}" "$_task" | while IFS= read -r _word; do printf '%s\n' "${1%%=*}=$_all$_word"; done
            ;;
        *) _launch_keys "$_task" | while IFS= read -r _word; do printf '%s=\n' "$_word"; done ;;
    esac
}
